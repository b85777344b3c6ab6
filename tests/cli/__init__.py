"""The front door: the command line, arguments, files, interrupts."""
