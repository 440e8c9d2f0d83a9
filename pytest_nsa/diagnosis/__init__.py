"""Evidence to verdict (a rule a cause) and verdicts to decision. Pure: no file is read or written here."""
