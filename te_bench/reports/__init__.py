"""Reads records and logs, and nothing else."""

import re

#: What moves a cursor, turns the direction of writing, or is no character: file names may hold it.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
