"""A benchmark of communication bugs: faulty torch.distributed programs, their correct twins, and what tools say.

``pairs`` says what a pair is and finds them; ``programs`` has them, ``programs/frozen`` those that no tool of this
project had run when they were written. ``real`` runs one on real processes, ``peers`` asks other tools about all.
"""
