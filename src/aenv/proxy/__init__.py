"""From outside into sandboxes: routing, HTTP, WebSocket."""

from aenv.proxy.app import ProxyApp

__all__ = ["ProxyApp"]
