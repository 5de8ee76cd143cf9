"""The parts of `fenceguard demo`: story, stage, crew, play, screen, and the worker's own program."""
