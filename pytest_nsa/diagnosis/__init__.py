"""Evidence to verdict (by rules) and verdicts to decision. Pure: no file of a test is read or written here."""
