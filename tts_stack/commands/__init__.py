"""The commands of the command line, a group of them a file."""
