"""What a training step takes in every mode, and the largest batch for 8 to 80 GB; see :mod:`.table`."""

from .table import main

if __name__ == "__main__":
    main()
