"""Antiphon's codec rates: `antiphon_codec.py messages.json SECONDS`; bench/README.md has the shape."""

import json
import sys
import time

import msgspec

from antiphon.schema import decoder, encode, v1

PARAMS = {method.name: method.params for method in v1.METHODS}


class Received(msgspec.Struct, gc=False):
    """A frame, its parameters left as bytes until the method is known."""

    method: str
    params: msgspec.Raw
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Sent(msgspec.Struct, gc=False, omit_defaults=True):
    """A frame to send."""

    jsonrpc: str
    method: str
    params: object
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


RECEIVED = msgspec.json.Decoder(Received).decode
TYPED = {name: decoder(params) for name, params in PARAMS.items()}


def decode(frame):
    message = RECEIVED(frame)
    return message, TYPED[message.method](message.params)


def rate(call, argument, seconds):
    count, clock = 1, time.perf_counter
    while True:
        begin = clock()
        for _ in range(count):
            call(argument)
        spent = clock() - begin
        if spent >= seconds:
            return count / spent
        count = max(count * 2, int(count * seconds / max(spent, 1e-9) * 1.1))


def main():
    path, seconds = sys.argv[1], float(sys.argv[2])
    with open(path, encoding="utf-8") as file:
        messages = json.load(file)
    report = {}
    for name, message in messages.items():
        frame = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
        head, params = decode(frame)
        sent = Sent(jsonrpc="2.0", method=head.method, params=params, id=head.id)
        assert json.loads(encode(sent)) == message, name
        report[f"decode {name}"] = rate(decode, frame, seconds)
        report[f"encode {name}"] = rate(encode, sent, seconds)
    print(json.dumps(report))


main()
