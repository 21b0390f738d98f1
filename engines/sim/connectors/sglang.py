"""SGLang's disaggregation: both halves at once, in one bootstrap room; the same body may go to both."""

from __future__ import annotations

from collections.abc import Hashable

from engines.sim.connectors.base import Connector, DecodeLeg, Leg, PrefillLeg, own_hit
from engines.sim.generation import Asked
from engines.sim.place import Place
from engines.sim.request import Request

NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id."
ROOMS = range(2**63)


class Sglang(Connector):
    pushes = True
    bootstraps = True

    def rank(self, asked: Asked) -> int | None:
        """SGLang's `follow_bootstrap_room`: on both sides the room tells prefill's rank."""
        room = _each(asked.wire.room, asked)[0]
        return room % self.settings.dp_size if self.place.role == "prefill" and type(room) is int else None

    def leg(self, asked: Asked, request_id: str | None, rank: int) -> Leg:  # noqa: ARG002
        if self.place.role == "both":
            return Leg()
        if asked.n != 1:
            raise self.refuse("several answers share one bootstrap room")
        rooms, hosts, ports = self._rooms(asked), _each(asked.wire.host, asked), _each(asked.wire.port, asked)
        if self.place.role == "prefill":
            return self._prefill(rooms, hosts, ports, rank)
        addresses = list(zip(hosts, ports, strict=True))
        return DecodeLeg(
            self,
            lambda index: self._engine_id(addresses[index], rooms[index], asked.wire.prefill_rank),
            lambda index: (*map(_name, addresses[index]), rooms[index]),
            own_hit,
            message=f"Lost connection with prefill instance (bootstrap_addr: {hosts[0]}:{ports[0]})",
        )

    def _prefill(self, rooms: list[int], hosts: list[object], ports: list[object], rank: int) -> Leg:
        place = self.place
        strays = [
            (host, port)
            for host, port in zip(hosts, ports, strict=True)
            if host != place.host or port not in (None, place.bootstrap_port)
        ]
        if strays:
            self.violate(f"a prefill whose bootstrap address is {strays[0]}, not {place.host}:{place.bootstrap_port}")

        def key(index: int, _request: Request) -> Hashable:
            here = (place.host, place.bootstrap_port)
            # A stray's room is nowhere that a decode could find it.
            return (*here, rooms[index], "stray") if strays else (*here, rooms[index])

        leg = PrefillLeg(self.transfers, place.engine_ids[rank], key, waits=True)
        leg.max_tokens = 1
        return leg

    def _rooms(self, asked: Asked) -> list[int]:
        """Raises Refused unless there is one for each prompt."""
        wire, count = asked.wire, len(asked.prompts)
        for given in (wire.room, wire.host, wire.port):
            if isinstance(given, list) and (not wire.batch or len(given) != count):
                text = "the bootstrap fields are no list of as many as the prompts"
                raise self.refuse(text, 400, text)
        rooms = _each(wire.room, asked)
        if isinstance(wire.room, int) and not isinstance(wire.room, bool):
            rooms = [*range(wire.room, wire.room + count)]
        known = [room for room in rooms if type(room) is int and room in ROOMS]
        if len(known) != count:
            raise self.refuse(f"a {self.place.role} without bootstrap_room: {wire.room!r}", 400, NO_ROOM)
        return known

    def _engine_id(self, address: tuple[object, object], room: int, rank: object) -> str:
        """Of the prefill rank that decode expects; empty where there is none."""
        for place in self.fleet.places:
            if place.role == "prefill" and (place.host, place.bootstrap_port) == address:
                return _of_rank(place, room % len(place.engine_ids) if rank is None else rank)
        return ""


def _of_rank(place: Place, rank: object) -> str:
    return place.engine_ids[rank] if isinstance(rank, int) and 0 <= rank < len(place.engine_ids) else ""


def _each(given: object, asked: Asked) -> list[object]:
    return given if isinstance(given, list) and given else [given] * len(asked.prompts)


def _name(part: object) -> Hashable:
    return part if isinstance(part, str | int) else repr(part)
