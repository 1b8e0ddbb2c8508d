"""Post-training by reinforcement: what a model is asked and how its answers are judged (``tasks``)."""
