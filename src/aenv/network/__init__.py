"""Network slots: namespaces, taps, addresses, egress policy and name resolution of sandboxes."""
