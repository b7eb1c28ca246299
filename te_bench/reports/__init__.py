"""Read records and logs, and turn them into reports. Nothing here measures."""

import re

#: Control characters: they move a cursor, reverse the direction of writing, or are invalid. File names may hold them.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
