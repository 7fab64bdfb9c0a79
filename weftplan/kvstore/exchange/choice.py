"""The choice of routes: the fastest push and pull according to the time model in ``program.py``.

The choice depends only on links, sizes and settings, so repeated runs add in the same order and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.device.context import Context
from weftplan.device.interconnect import interconnect, joined
from weftplan.device.links import Interconnect
from weftplan.kvstore.exchange.program import ExchangeProgram, pull_steps, push_steps
from weftplan.kvstore.exchange.ways import SumRoute, TreeRule, routes_between, trees
from weftplan.support.package_log import log


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """The programs that exchange one array.

    Attributes:
        route: route of the push.
        push: program of the push.
        pull: program of the fastest pull; its route may differ from ``route``, since copies have no order of additions.
        seconds: modelled seconds of a push and a pull, by name of each route that was tried.
    """

    way: SumRoute
    push: ExchangeProgram
    pull: ExchangeProgram
    seconds: dict[str, float]


class Chooser:
    """Chooses and caches the plans of a store; the cache is cleared when the links of devices are set again.

    Args:
        peers: whether direct copies between devices are allowed (MXNET_ENABLE_GPU_P2P).
        trees_only: whether only trees are candidates (MXNET_KVSTORE_USETREE).
        rule: settings of the search for trees.
        log_trees: whether to log each chosen tree (MXNET_KVSTORE_LOGTREE).
    """

    def __init__(self, *, peers: bool, trees_only: bool, rule: TreeRule, log_trees: bool) -> None:
        self.peers = peers
        self._trees_only = trees_only
        self._rule = rule
        self._log_trees = log_trees
        self._joined = joined()
        self._links: dict[tuple[Context, ...], Interconnect | None] = {}
        self._plans: dict[tuple[tuple[Context, ...], int, int, int], ExchangePlan] = {}

    def links(self, contexts: Sequence[Context]) -> Interconnect | None:
        """Return the interconnect of two or more distinct GPUs or simulated devices; None for other contexts."""
        devices = tuple(contexts)
        joined_devices = joined()
        if any(new is not old for new, old in zip(joined_devices, self._joined, strict=True)):
            self._joined = joined_devices
            self._links.clear()
            self._plans.clear()
        if devices not in self._links:
            self._links[devices] = self._find(devices)
        return self._links[devices]

    def _find(self, devices: tuple[Context, ...]) -> Interconnect | None:
        if not 2 <= len(set(devices)) == len(devices):
            return None
        links = interconnect(devices)
        if links is None or not self.peers:
            return links and links.without_peers()
        unlinked = [
            (a, b) for a in range(len(devices)) for b in range(len(devices)) if a != b and not links.peers(a, b)
        ]
        if unlinked and devices[0].device_type == "gpu":
            rows = "\n".join(
                " ".join("v" if a == b or links.peers(a, b) else "." for b in range(len(devices)))
                for a in range(len(devices))
            )
            log.warning("%d pairs of devices are no peers, their copies go through the host:\n%s", len(unlinked), rows)
        return links

    def plan(self, contexts: Sequence[Context], home: int, elements: int, itemsize: int) -> ExchangePlan | None:
        """Return the plan for an array of ``elements`` summed at ``contexts[home]``; None without links or elements."""
        devices = tuple(contexts)
        links = self.links(devices)
        if links is None or not elements:
            return None
        plan = self._plans.get((devices, home, elements, itemsize))
        if plan is None:
            plan = self._plans[devices, home, elements, itemsize] = self._choose(links, home, elements, itemsize)
            if self._log_trees and plan.way.name in ("tree", "trees"):
                for share in plan.way.shares:
                    log.warning("elements %d to %d: parents %s", share.begin, share.end, share.parents)
        return plan

    def _choose(self, links: Interconnect, home: int, elements: int, itemsize: int) -> ExchangePlan:
        find = trees if self._trees_only else routes_between
        plans = [planned(route, home, links, itemsize) for route in find(links, elements, home, self._rule)]
        seconds: dict[str, float] = {}
        for route, push, pull in plans:
            seconds[route.name] = min(push.seconds + pull.seconds, seconds.get(route.name, float("inf")))
        route, push, _ = min(plans, key=lambda candidate: candidate[1].seconds + candidate[2].seconds)
        return ExchangePlan(route, push, min([pull for _, _, pull in plans], key=lambda pull: pull.seconds), seconds)


def planned(
    route: SumRoute, home: int, links: Interconnect, itemsize: int
) -> tuple[SumRoute, ExchangeProgram, ExchangeProgram]:
    """Return (the route, its push program, its pull program)."""
    return route, push_steps(route, home, links, itemsize), pull_steps(route, home, links, itemsize)
