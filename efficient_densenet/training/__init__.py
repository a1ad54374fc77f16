"""What demo.py is made of: flags, data, processes, the training loop and the files that a run leaves."""
