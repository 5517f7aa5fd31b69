"""Models in folders: of Hugging Face and of runs, read and written."""
