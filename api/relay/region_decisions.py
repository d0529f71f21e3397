"""What became of updates of rounds within the region: the relay's own receipts, as often as asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from roundtable.proto import agent_pb2
from roundtable.relay.region_spans import RoundMade
from roundtable.relay.silos import Asked
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.services.upload_receipts import Outcome, Receipts

MOST_DECIDED = 256
Receipt = agent_pb2.UploadReceipt


class RegionDecisions:
    """Of the newest rounds that are over, whose updates are in the region's model."""

    def __init__(self, receipts: Receipts) -> None:
        self._receipts = receipts
        self._members: OrderedDict[Asked, Mapping[str, str]] = OrderedDict()

    def __contains__(self, asked: Asked) -> bool:
        """Whether the round of this step is over."""
        return asked in self._members

    def settle(self, asked: Asked, made: RoundMade | None) -> None:
        """The round is over; None for one that has come to nothing."""
        members = made.members if made is not None else {}
        self._members[asked] = {silo: str(digest) for silo, (digest, _) in members.items()}
        while len(self._members) > MOST_DECIDED:
            self._members.popitem(last=False)

    def receipt(self, silo: str, offer: UploadOffer, asked: Asked) -> Receipt:
        """For an update of a round that is over."""
        digest = self._members.get(asked, {}).get(silo)
        if digest == offer.digest:
            outcome = Outcome(Receipt.ACCEPTED, "in the region's model of this round")
        elif digest is not None:
            outcome = Outcome(Receipt.DUPLICATE, f"another update of this step is in: {digest[:12]}")
        else:
            outcome = Outcome(Receipt.STALE, "the round within the region is over")
        return self._receipts.give(silo, offer, outcome)

    def refused(self, silo: str, offer: UploadOffer, problem: str) -> Receipt:
        """For an update that can be part of no sum."""
        return self._receipts.give(silo, offer, Outcome(Receipt.REJECTED, problem))
