"""Rows that change ranks and come back: counted on the way, ordered before and after.

Methods that begin with `start` send rows and return what is called for those that come; their namesakes wait at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import define, field, frozen
from device_mesh import Communicator

from moe_dispatch.layout import Array, Ints
from moe_dispatch.plan import Arrival, inverse
from moe_dispatch.row_sums import RowSums

Arriving = Callable[[], Array]
"""Waits for rows that are under way, and returns them; to be called once."""


@define
class BytesSent:
    """What a rank has sent to others: tokens, and numbers about them. What stays on the rank is not sent."""

    within_nodes: int = 0
    between_nodes: int = 0


@frozen(eq=False)
class Link:
    """A group of ranks whose exchanges are counted.

    Attributes:
        group: the ranks.
        nodes: (ranks,) on which node each of them is.
        sent: the account of this rank.
    """

    group: Communicator
    nodes: Ints
    sent: BytesSent

    def all_to_all(self, x: Array, send_sizes: Ints, receive_sizes: Ints) -> Array:
        """`Communicator.all_to_all`; a group of one rank returns `x` itself."""
        return self.start_all_to_all(x, send_sizes, receive_sizes)()

    def start_all_to_all(self, x: Array, send_sizes: Ints, receive_sizes: Ints) -> Arriving:
        """`x` must be left unchanged until what comes has been asked for."""
        if self.group.size == 1:
            return lambda: x
        to_others = send_sizes.copy()
        to_others[self.group.rank] = 0
        row_bytes = x.itemsize * int(np.prod(x.shape[1:]))
        same_node = self.nodes == self.nodes[self.group.rank]
        self.sent.within_nodes += row_bytes * int(to_others[same_node].sum())
        self.sent.between_nodes += row_bytes * int(to_others[~same_node].sum())
        out = np.empty((int(receive_sizes.sum()), *x.shape[1:]), x.dtype)
        request = self.group.iall_to_all(
            x, send_sizes=send_sizes.tolist(), receive_sizes=receive_sizes.tolist(), out=out
        )

        def arrived() -> Array:
            request.wait()
            return out

        return arrived

    def swap(self, x: Array) -> Array:
        """Row r of `x` to rank r, (ranks, ...); row r of the result is rank r's row for this rank."""
        ones = np.ones(self.group.size, np.int64)
        return self.all_to_all(np.ascontiguousarray(x), ones, ones)


@frozen(eq=False)
class Exchange:
    """Slots that change ranks. Every rank of the group calls the same methods in the same order.

    Attributes:
        link: between whom.
        order: (S,) the slots of this rank in the order in which they are sent.
        send_sizes: (ranks,) how many go to each rank.
        arrival: how many come, and how they are ordered.
    """

    link: Link
    order: Ints
    send_sizes: Ints
    arrival: Arrival
    places: Ints = field(init=False)

    @places.default
    def _invert(self) -> Ints:
        return inverse(self.order)

    def there(self, values: Array) -> Array:
        """A value (S, ...) for each slot, where the slots are going."""
        return self.carry(np.take(values, self.order, axis=0))

    def back(self, values: Array) -> Array:
        """Values where the slots went, (S, ...) for the slots here."""
        return np.take(self.carry_back(values), self.places, axis=0)

    def carry(self, sent: Array) -> Array:
        """Rows in sending order, arrived and arranged."""
        return self.start_carry(sent)()

    def start_carry(self, sent: Array) -> Arriving:
        arriving = self.link.start_all_to_all(sent, self.send_sizes, self.arrival.receive_sizes)
        arrangement = self.arrival.arrangement
        return arriving if arrangement is None else lambda: np.take(arriving(), arrangement, axis=0)

    def carry_back(self, arrived: Array) -> Array:
        """Arranged rows, returned to where they came from and in sending order there."""
        return self.start_carry_back(arrived)()

    def start_carry_back(self, arrived: Array) -> Arriving:
        arrangement = self.arrival.arrangement
        sent = arrived if arrangement is None else np.take(arrived, inverse(arrangement), axis=0)
        return self.link.start_all_to_all(sent, self.arrival.receive_sizes, self.send_sizes)


@frozen(eq=False)
class Spread:
    """Rows of which each has one or more slots: `there` copies a row to all of its slots, `back` adds them up.

    Attributes:
        exchange: where slots go.
        owners: (S,) the row of each slot, ascending.
        sums: the slots of each row.
    """

    exchange: Exchange
    owners: Ints
    sums: RowSums

    @classmethod
    def over(cls, exchange: Exchange, owners: Ints, num_rows: int) -> Spread:
        """Of `num_rows` rows."""
        return cls(exchange, owners, RowSums.of(np.bincount(owners, minlength=num_rows)))

    def there(self, rows: Array) -> Array:
        """(rows, H) here, (slots, H) where they arrive."""
        return self.start_there(rows)()

    def start_there(self, rows: Array) -> Arriving:
        return self.exchange.start_carry(np.take(rows, self.owners[self.exchange.order], axis=0))

    def back(self, rows: Array) -> Array:
        """(slots, H) where they arrived, (rows, H) here: sums over a row's slots."""
        return self.add(self.exchange.carry_back(rows))

    def add(self, returned: Array, weights: Array | None = None) -> Array:
        """(slots, H) from `carry_back`, (rows, H): sums over a row's slots, times weights (S,) by slot here."""
        return self.sums.add(returned, self.exchange.places, weights)
