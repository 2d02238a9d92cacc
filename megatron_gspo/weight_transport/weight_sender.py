"""A source's connection to the servers, kept between updates."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.config import ServerConfig
from megatron_gspo.errors import DiskError, EngineError, InputError, UserError
from megatron_gspo.servers.http_client import EventLoop, ServerClient, open_session
from megatron_gspo.servers.server_launch import read_api_key
from megatron_gspo.weight_transport.receiver_transport import Offer, ReceiverTransport
from megatron_gspo.weight_transport.server_endpoints import ServerInfo
from megatron_gspo.weight_transport.transport import Sent, Target, WeightTransport
from megatron_gspo.weight_transport.update_group import GroupError
from megatron_gspo.weight_transport.weight_update import Stream, send_weights


class WeightSender:
    """Sends one source's tensors; an event loop and HTTP session of its own, from the first
    transfer on.
    """

    def __init__(self, config: ServerConfig, transport: WeightTransport) -> None:
        self.transport = transport
        self._config = config
        self._loop: EventLoop | None = None

    def offer(self, infos: Sequence[ServerInfo], transfer: str) -> Offer | UserError:
        """What the servers need to join this source's process group; or why it can't make one."""
        assert isinstance(self.transport, ReceiverTransport)
        try:
            return self.transport.offer(self._targets(infos), transfer, self._config.update_timeout)
        except GroupError as error:
            return EngineError(f"{self._config.section}.{error}")

    def send(
        self, infos: Sequence[ServerInfo], stream: Stream, *, version: str, part: int = 0
    ) -> Sent | UserError:
        """Send to the servers that another rank has paused; or why this source can't, for all of
        them.

        The stream is read to its end. part: number of this source.
        """
        targets = self._targets(infos)
        assert self._loop is not None
        self.transport.begin(version, part)
        try:
            return send_weights(
                self._loop,
                self.transport,
                targets,
                stream,
                timeout=self._config.update_timeout,
                bucket_bytes=int(self._config.weight_bucket_mb * 2**20),
            )
        except DiskError as error:
            return error
        except ValueError as error:
            return InputError(str(error))

    def _targets(self, infos: Sequence[ServerInfo]) -> dict[str, Target]:
        if self._loop is None:
            self._loop = EventLoop()
            self._session = self._loop.run(open_session())
            self._key = read_api_key(self._config)
        return {
            info.url: Target(ServerClient(info.url, self._session, api_key=self._key), info)
            for info in infos
        }

    def close(self) -> None:
        """Close the connections. May be called again."""
        self.transport.close()
        if self._loop is not None:
            self._loop.run(self._session.close())
            self._loop.close()
            self._loop = None
