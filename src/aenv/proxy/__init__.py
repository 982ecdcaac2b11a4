"""From outside into sandboxes: routing, HTTP, WebSocket."""
