"""A server that speaks as much of W&B's protocol as its client needs to log, continue and sync runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class StoredRun:
    """What the server knows about a run."""

    project: str
    name: str
    group: str
    job: str
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # at which rows came
    exit_code: int | None = None


class WandBServer(ThreadingHTTPServer):
    """Keeps runs by their ids."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, StoredRun] = {}
        self.broken = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not reported."""


@contextmanager
def wandb_server() -> Iterator[WandBServer]:
    """A server on a port of its own."""
    with WandBServer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class _Answer(BaseHTTPRequestHandler):
    server: WandBServer

    def do_POST(self) -> None:
        """A query, or a part of a run's history."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        if self.server.broken:
            self._reply({}, status=503)
        elif "query" in told:
            answers = {"RunResumeStatus": self._status, "UpsertBucket": self._upsert, "CreateRunFiles": self._files}
            answer = answers.get(told.get("operationName"), lambda variables: {})
            self._reply({"data": answer(told.get("variables") or {})})
        else:
            self._stream(told)
            self._reply({"exitcode": None, "limits": {}})

    def do_PUT(self) -> None:
        """A file, which is not kept."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply({}, status=503 if self.server.broken else 200)

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def _reply(self, content: object, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, told: dict[str, Any]) -> None:
        run = self.server.runs[self.path.split("/")[-2]]
        if history := told.get("files", {}).get("wandb-history.jsonl"):
            run.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
            run.offsets.append(history["offset"])
        if told.get("complete"):
            run.exit_code = told["exitcode"]

    def _status(self, asked: dict[str, Any]) -> dict[str, Any]:
        run = self.server.runs.get(asked["name"])
        bucket = run and {
            "id": asked["name"],
            "name": asked["name"],
            "displayName": run.name,
            "notes": None,
            "tags": [],
            "historyLineCount": len(run.rows),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "wandbConfig": '{"t":1}',
            "summaryMetrics": "{}",
            "config": json.dumps(run.config),
            "eventsTail": "[]",
            "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
        }
        return {"model": {**self._project(asked["project"]), "bucket": bucket}}

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        name, runs = given["name"], self.server.runs
        new = name not in runs
        if new:
            runs[name] = StoredRun(given["project"], given["displayName"], given["groupName"], given["jobType"])
        runs[name].config |= json.loads(given["config"] or "{}")
        if not new and given["displayName"]:
            runs[name].exit_code = None  # it runs again
        bucket = {"id": name, "name": name, "displayName": runs[name].name, "description": None, "config": "{}"}
        bucket |= {"sweepName": None, "historyLineCount": len(runs[name].rows)}
        return {"upsertBucket": {"bucket": {**bucket, "project": self._project(given["project"])}, "inserted": new}}

    def _files(self, given: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.server.url}/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def _project(self, name: str) -> dict[str, Any]:
        return {"id": "project", "name": name, "entity": {"id": "entity", "name": "me"}}
