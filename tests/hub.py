"""A Hub on this machine: what the client of huggingface_hub asks, answered from a folder."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from checkpoint_files import save


class Hub:
    """``add`` makes a revision; ``asked`` lists what was fetched, commit and file; ``down`` fail."""

    def __init__(self, root):
        self.root, self.repos, self.asked, self.down = root, {}, [], set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answer,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def add(self, repo, revision, state, name="model.safetensors", commit=None):
        commit = commit or hashlib.sha1(revision.encode()).hexdigest()
        self.repos.setdefault(repo, {})[revision] = commit
        folder = self.root / repo / commit
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").touch()
        if state is not None:
            save(state, folder, name)
        return folder

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def fetched(self):
        """Revisions of which files were fetched."""
        names = {commit: revision for revisions in self.repos.values() for revision, commit in revisions.items()}
        return [names[commit] for commit, name in self.asked if name != "README.md"]


class Answer(BaseHTTPRequestHandler):
    hub = None
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body=b"", status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(refs|tree|revision)(?:/(\w+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path)
        if not (api or file):
            return self.answer(status=404)
        repo = (api or file)[1]
        if repo in self.hub.down:
            return self.answer(status=403)
        if repo not in self.hub.repos:
            return self.answer(status=404, X_Error_Code="RepoNotFound")
        if api and api[2] == "refs":
            refs = [{"name": n, "ref": n, "targetCommit": c} for n, c in self.hub.repos[repo].items()]
            return self.answer(json.dumps({"branches": refs, "tags": [], "converts": []}).encode())
        commit = (api or file)[3 if api else 2]
        commit = self.hub.repos[repo].get(commit, commit)
        if commit in self.hub.down:
            return self.answer(status=403)
        folder = self.hub.root / repo / commit
        if not folder.is_dir():
            return self.answer(status=404, X_Error_Code="RevisionNotFound")
        names = sorted(p.name for p in folder.iterdir())
        if api and api[2] == "tree":
            tree = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": n} for n in names]
            return self.answer(json.dumps(tree).encode())
        if api:
            info = {"id": repo, "sha": commit, "siblings": [{"rfilename": n} for n in names]}
            return self.answer(json.dumps(info).encode())
        if file[3] not in names:
            return self.answer(status=404, X_Error_Code="EntryNotFound")
        body = (folder / file[3]).read_bytes()
        tag = f'"{hashlib.sha1(body).hexdigest()}"'
        if self.command == "GET":
            self.hub.asked.append((commit, file[3]))
        return self.answer(body, ETag=tag, X_Repo_Commit=commit)
