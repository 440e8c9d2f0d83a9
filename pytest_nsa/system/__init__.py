"""What Linux provides: processes, sockets, leases. Imports nothing else of this package."""
