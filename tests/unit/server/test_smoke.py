from tensorhub import messages as m
from tests.unit.server.kit import *



def test_a():
    c = Cluster()
    t = c.process("trainer")
    r = c.process("roll")
    assert t.publish(1) == m.Ok()
    assert t.seal(1) == m.Ok()
    g = c.fetched(r, 1)
    u = t.unpublish()
    assert isinstance(t.answer(u), m.Unpublished)
    assert c.state_of(1) == "readable"


def test_g():
    c = Cluster(shards=2)
    t0, t1 = c.group("trainer")
    a0, a1 = c.group("roll")
    q = a0.replicate()
    t0.publish(1)
    assert a0.answer(q) is None
    t1.publish(1)
    assert isinstance(a0.answer(q), m.Granted)
    u = t1.unpublish()
    assert t1.answer(u) is None
    q1 = a1.replicate()
    print(a1.answer(q1))
    t0.seal(1)
    t1.seal(1)
    d0 = a0.done(1)
    assert a0.answer(d0) is None
    d1 = a1.done(1)
    assert isinstance(a1.answer(d1), m.Committed) and a0.answer(d0) == a1.answer(d1)
    assert isinstance(t1.answer(u), m.Unpublished)
    c.wait(60)
    print(c.machine.state)
    assert not c.machine.state.generations and not c.machine.state.sessions
