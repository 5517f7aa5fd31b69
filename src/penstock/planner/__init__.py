"""The planner: which layout and schedule for this model on these machines, by simulating the programs themselves."""
