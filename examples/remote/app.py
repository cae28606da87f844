"""An app whose jobs are done elsewhere: its tasks say what they take and return. SHIFTWORK_GATEWAY_TOKEN=… shiftwork gateway app.py"""

from __future__ import annotations

from datetime import timedelta

import shiftwork

app = shiftwork.App()


@app.task(queue="words", retry=shiftwork.Retry(max_attempts=3, delay=timedelta(seconds=5)))
def count_words(text: str) -> int:
    """How many words a text has."""
    raise NotImplementedError("done by remote workers; see worker.py")
