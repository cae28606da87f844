"""The life of a job, verb by verb."""

from __future__ import annotations

from tests.harness import Protocol


def test_a_job_is_enqueued_claimed_and_completed(protocol: Protocol) -> None:
    job = protocol.enqueue("greet", {"name": "Ada"})
    worker = protocol.register()
    [claimed] = protocol.claim(worker).jobs
    assert (claimed["id"], claimed["payload"], claimed["attempt"]) == (job, {"name": "Ada"}, 1)
    assert protocol.complete(worker, [claimed], "hello") == {job: "settled"}
    assert protocol.job(job)["result"] == "hello"
