"""What the fork server imports first, so that it dies with te-bench: kill -9 of that would leave it importing torch.

It looks for te-bench's end only once everything is imported, seconds later, on a busy machine many.
"""

import os

from te_bench.experiments import orphans, runner

orphans.end_with_parent(int(os.environ[runner.RUNNER]))
SERVER = os.getpid()  # which the fork server's children inherit
