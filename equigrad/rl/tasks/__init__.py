"""Tasks: what a model is asked, and what its answers are worth. Knows nothing of models, tokens or training.

What a task of one's own needs is here; ``registry`` makes the tasks of a job.
"""

from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Conversation, Problem, Question, Task, Turn, Verdict

__all__ = ["Conversation", "Draw", "Problem", "Question", "Task", "Turn", "Verdict"]
