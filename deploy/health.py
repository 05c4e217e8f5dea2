"""The container's health check: exit code 0 while the server in it takes requests.

It asks directly, whatever proxy the environment names. OFFRAMP_PORT is the server's: empty, or Kubernetes' link to a
service called offramp (tcp://10.0.0.7:8000), it is as unset.
"""

import http.client
import os
import sys

port = os.environ.get("OFFRAMP_PORT", "").strip()
if not port or "://" in port:
    port = "8000"
try:
    server = http.client.HTTPConnection("127.0.0.1", int(port), timeout=2)
    server.request("GET", "/v2/health/ready")
    status = server.getresponse().status
except (OSError, OverflowError, ValueError, http.client.HTTPException) as error:
    sys.exit(f"no answer at port {port}: {error}")
if status != 200:
    sys.exit(f"port {port} answers {status}")
