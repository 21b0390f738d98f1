"""Who waits for a worker, and for how long."""

from __future__ import annotations

from router.outage import Outage
from router.scheduling.limits import Limits

PATIENCE = 10.0


class Request:
    def __init__(self, arrived: float = 0.0, tenant: str = "") -> None:
        self.arrived = arrived
        self.tenant = tenant
        self.served = False
        self.ends: list[str] = []

    def try_again(self) -> bool:
        if self.served:
            self.ends.append("sent")
        return self.served

    def give_up(self) -> None:
        self.ends.append("given up")


def test_each_is_sent_once_a_worker_is_up_for_it() -> None:
    outage, first, second = Outage(PATIENCE, Limits(9)), Request(), Request()
    outage.hold(first)
    outage.hold(second)
    outage.tick(1.0)
    first.served = True
    outage.tick(2.0)
    outage.tick(3.0)
    assert (first.ends, second.ends, outage.held) == (["sent"], [], 1)


def test_the_wait_counts_from_the_requests_arrival() -> None:
    outage, early, late = Outage(PATIENCE, Limits(9)), Request(0.0), Request(5.0)
    outage.hold(early)
    outage.hold(late)
    outage.tick(9.9)
    assert early.ends == []
    outage.tick(10.0)
    assert (early.ends, late.ends, outage.held) == (["given up"], [], 1)
    assert not outage.takes(early, 10.0)
    assert outage.takes(late, 14.9)


def test_a_request_may_be_sent_in_the_last_moment() -> None:
    outage, request = Outage(PATIENCE, Limits(9)), Request()
    outage.hold(request)
    request.served = True
    outage.tick(PATIENCE)
    assert request.ends == ["sent"]


def test_there_is_room_for_so_many() -> None:
    limits = Limits(1)
    outage, first, second = Outage(PATIENCE, limits), Request(), Request()
    assert outage.takes(first, 0.0)
    outage.hold(first)
    assert not outage.takes(second, 0.0)
    limits.max_queue = 2
    assert outage.takes(second, 0.0), "the limits may change at any time"
    outage.withdraw(first)
    outage.withdraw(second)
    assert outage.takes(second, 0.0)


def test_a_tenant_does_not_take_the_places_of_all_others() -> None:
    outage = Outage(PATIENCE, Limits(3))
    many = [Request(tenant="many") for _ in range(4)]
    few = [Request(tenant="few") for _ in range(2)]
    for request in many[:3]:
        outage.hold(request)
    assert not outage.takes(many[3], 0.0)
    assert outage.takes(few[0], 0.0)
    outage.hold(few[0])
    assert [request.ends for request in many[:3]] == [[], [], ["given up"]]
    assert outage.held == 3
    assert not outage.takes(few[1], 0.0), "two of each would be no fairer"
    outage.withdraw(many[0])
    outage.withdraw(many[0])
    assert outage.takes(many[3], 0.0)
    outage.hold(many[3])
    assert not outage.takes(few[1], 0.0), "and none is counted twice"


def test_the_last_of_the_tenant_with_the_most_leaves_whoever_came_after_it() -> None:
    outage = Outage(PATIENCE, Limits(3))
    requests = [Request(tenant=tenant) for tenant in ("a", "a", "b", "c")]
    for request in requests:
        outage.hold(request)
    assert [request.ends for request in requests] == [[], ["given up"], [], []]


def test_without_a_limit_all_are_held_and_tenants_that_are_gone_are_forgotten() -> None:
    outage = Outage(PATIENCE, Limits(max_queue=None))
    for number in range(100):
        request = Request(tenant=str(number))
        assert outage.takes(request, 0.0)
        outage.hold(request)
    outage.tick(PATIENCE)
    assert (outage.held, len(outage._tenants)) == (0, 0)


def test_a_smaller_limit_refuses_none_of_those_held() -> None:
    limits = Limits(4)
    outage = Outage(PATIENCE, limits)
    requests = [Request(tenant=tenant) for tenant in ("a", "a", "a", "b")]
    for request in requests:
        outage.hold(request)
    limits.max_queue = 1
    outage.tick(1.0)
    assert (outage.held, [request.ends for request in requests]) == (4, [[]] * 4)


def test_who_is_alone_takes_all_places_and_no_more() -> None:
    outage = Outage(PATIENCE, Limits(0))
    assert not outage.takes(Request(), 0.0)


def test_one_may_take_another_along() -> None:
    """A client that gets its answer may break off its other requests."""
    outage, second = Outage(PATIENCE, Limits(9)), Request()

    class First(Request):
        def give_up(self) -> None:
            super().give_up()
            outage.withdraw(second)

    first = First()
    outage.hold(first)
    outage.hold(second)
    outage.tick(PATIENCE)
    assert (first.ends, second.ends, outage.held) == (["given up"], [], 0)


def test_one_that_has_to_wait_again_at_once_is_not_lost() -> None:
    outage = Outage(PATIENCE, Limits(max_queue=9))

    class Flapping(Request):
        def try_again(self) -> bool:
            outage.hold(self)
            return True

    outage.hold(Flapping())
    outage.tick(1.0)
    assert outage.held == 1
