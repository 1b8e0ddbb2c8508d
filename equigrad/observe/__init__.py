"""What a run shows and writes about itself: progress, metrics, traces and the report. Nothing here changes a result.

Start-up time is a stated goal: no module of this room imports torch, rich, tensorboard or wandb before it needs it
(``peak``, which is about torch, excepted).
"""
