-- The bodies that offramp prepared, in turn; each thread begins at another one.
local source, threads = [==[@SOURCE@]==], 0
local requests, last = {}, 0

function setup(thread)
  thread:set("first", threads)
  threads = threads + 1
end

function init(args)
  local file = assert(io.open(source, "rb"))
  local size = file:read("*n")
  while size do
    file:read(1)
    requests[#requests + 1] = file:read(size)
    size = file:read("*n")
  end
  file:close()
  last = first * 7919 % #requests
end

function request()
  last = last % #requests + 1
  return requests[last]
end

function done(summary, latency, rates)
  local e = summary.errors
  io.write(string.format(
    'offramp {"microseconds":%.0f,"requests":%.0f,"connect":%.0f,"read":%.0f,"write":%.0f,"status":%.0f,' ..
    '"timeout":%.0f,"p50":%.0f,"p90":%.0f,"p99":%.0f}\n',
    summary.duration, summary.requests, e.connect, e.read, e.write, e.status, e.timeout,
    latency:percentile(50), latency:percentile(90), latency:percentile(99)))
end
