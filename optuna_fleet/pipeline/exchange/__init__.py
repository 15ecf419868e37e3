"""Exchange of preprocessed samples between nodes. Importing it imports no torch.

``scheme`` and ``cost`` decide, purely; ``exchange`` is the agent's side, ``exchanger`` a process
per node that talks to those of other nodes over ``link``. What any node can't get in time it
preprocesses itself, so no other node's fate changes what a trial reads.
"""

from optuna_fleet.pipeline.exchange.config import ExchangeConfig
from optuna_fleet.pipeline.exchange.exchange import Exchange, Inlets

__all__ = ["Exchange", "ExchangeConfig", "Inlets"]
