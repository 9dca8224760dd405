"""An address of IPv6 with a port is a text on the command line, although it begins as a YAML list does."""

from __future__ import annotations

import pytest

from lockstep.config.reading import Leaf, read_value


@pytest.mark.parametrize("text", ["[::1]:29500", "[fd77::1]:1", "[fe80::1%eth0]:29500", "[::ffff:10.0.0.1]:29500"])
def test_an_ipv6_address_with_a_port_is_a_text(text: str) -> None:
    node, problems = read_value(text, "--rendezvous")
    assert isinstance(node, Leaf)
    assert (node.value, problems) == (text, [])


def test_a_list_stays_a_list() -> None:
    node, problems = read_value("[a:b, c]", "--names")
    assert not isinstance(node, Leaf)
    assert problems == []
