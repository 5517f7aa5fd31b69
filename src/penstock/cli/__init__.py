"""The commands, one file each; the only room that reads the command line and prints."""
