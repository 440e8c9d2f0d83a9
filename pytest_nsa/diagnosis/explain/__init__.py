"""One model of what the ranks did: where each is in the program, and which edit of one rank's calls explains the rest."""
