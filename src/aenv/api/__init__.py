"""The HTTP surface: the E2B REST contract over `Sandboxes` and the templates. `app.create_app` puts it together."""
