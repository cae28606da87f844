"""A remote worker: no way to the database, and nothing but Python. GATEWAY=https://… SHIFTWORK_GATEWAY_TOKEN=… python worker.py"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from typing import Any

GATEWAY = os.environ.get("GATEWAY", "http://127.0.0.1:8722")
TASKS = {"count_words": lambda text: len(text.split())}


def say(path: str, token: str, method: str = "POST", **said: Any) -> tuple[int, Any]:
    """Ask the gateway, again and again while it or its database is away; gives the status and the answer."""
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(GATEWAY + path, json.dumps(said).encode(), headers, method=method)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != 503:
                return error.code, json.loads(error.read() or "null")
        except OSError as error:
            print(f"{GATEWAY} is away: {error}", file=sys.stderr)
        time.sleep(2)


def work(me: dict[str, Any], job: dict[str, Any]) -> None:
    """Do one job; meanwhile a thread says that it is still being done."""
    done, path = threading.Event(), f"/jobs/{job['id']}"

    def beat() -> None:
        while not done.wait(me["heartbeat"]):
            say(f"/workers/{me['worker']}/heartbeat", me["token"], jobs=[job["token"]])

    threading.Thread(target=beat, daemon=True).start()
    try:
        result = TASKS[job["task"]](**job["payload"])
        status, answer = say(f"{path}/complete", job["token"], result=result)
    except Exception as error:
        told = {"message": str(error), "type": type(error).__name__, "traceback": traceback.format_exc()}
        status, answer = say(f"{path}/error", job["token"], **told)
    finally:
        done.set()
    print(f"job {job['id']}: {answer['state'] if status == 200 else answer['error']}", flush=True)


def main() -> None:
    """Register, and take one job after the other, until told to stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    secret, status, me, found = os.environ["SHIFTWORK_GATEWAY_TOKEN"], 410, {}, {}
    try:
        while status in (200, 204, 410):
            if status == 410:  # not known yet, or taken for dead
                status, me = say("/workers", secret, host=socket.gethostname(), tasks=list(TASKS))
                if status != 201:
                    sys.exit(me["error"])
            status, found = say(f"/workers/{me['worker']}/dequeue", me["token"], wait=20)
            if status == 200:
                work(me, found["jobs"][0])
        sys.exit(found["error"])
    finally:
        if "worker" in me:
            say(f"/workers/{me['worker']}", me["token"], method="DELETE")


if __name__ == "__main__":
    main()
