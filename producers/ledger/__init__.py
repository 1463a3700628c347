"""The `ledger` environment: total a list of credits and debits with a calculator, one call a turn, then answer."""

from tidemill.producers.environment import Environment
from tidemill.producers.harness import TurnHarness
from tidemill.producers.ledger.reward import LedgerReward
from tidemill.producers.ledger.tasks import draw
from tidemill.producers.ledger.world import LedgerWorld

LEDGER = Environment(name="ledger", world=LedgerWorld, harness=TurnHarness, reward=LedgerReward(), tasks=draw)
