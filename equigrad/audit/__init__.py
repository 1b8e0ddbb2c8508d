"""Trajectories of runs, and the replay that confirms or contradicts them."""
