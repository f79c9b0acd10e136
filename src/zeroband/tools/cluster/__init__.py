"""Several nodes on one machine as real processes, with their Redis and network, and the clean-up. Linux only."""

from zeroband.elastic.store.local_server import RedisServer, find_redis_server
from zeroband.tools.cluster.local import LocalCluster
from zeroband.tools.cluster.network import STORE, Network
from zeroband.tools.cluster.node_process import NodeProcess

__all__ = ["STORE", "LocalCluster", "Network", "NodeProcess", "RedisServer", "find_redis_server"]
