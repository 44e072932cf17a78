-- A wrk script: POST one file's bytes again and again, and print the outcome as one line of JSON.
-- Environment: BODY_FILE, HEADERS_FILE (lines "Name: value"), URL_PATH.
local function read_file(name)
  local file = assert(io.open(assert(os.getenv(name), name .. " is not set"), "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

local threads = {}
local request_bytes
others = 0 -- answers that were not a 200; global, so that done() can read it from each thread

function setup(thread)
  table.insert(threads, thread)
end

function init(_)
  local headers = {}
  for name, value in read_file("HEADERS_FILE"):gmatch("([^:\n]+):%s*([^\n]*)") do
    headers[name] = value
  end
  request_bytes = wrk.format("POST", os.getenv("URL_PATH"), headers, read_file("BODY_FILE"))
end

function request()
  return request_bytes
end

function response(status, _, _)
  if status ~= 200 then
    others = others + 1
  end
end

function done(summary, latency, _)
  local errors = summary.errors
  local not_200 = 0
  for _, thread in ipairs(threads) do
    not_200 = not_200 + thread:get("others")
  end
  io.write(string.format(
    'RESULT {"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,'
      .. '"connect":%d,"read":%d,"write":%d,"not_200":%d,"timeout":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect, errors.read, errors.write, not_200, errors.timeout))
end
