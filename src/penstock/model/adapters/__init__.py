"""Models of other libraries, run by their own code."""
