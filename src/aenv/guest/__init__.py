"""The guest: kernel and initramfs provisioning, and the client of its daemon."""
