"""The command line: parsing and printing only, one file per command. Starts without torch."""
