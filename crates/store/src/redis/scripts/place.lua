-- Gives a long value, or one that was uploaded in parts, its name.
local _, path, when, wanted, etag, mark, crc, words, beside, size, upload = unpack(ARGV)
local no = refusal(path, when, wanted, etag)
if no == 'done' then redis.call('UNLINK', beside) end
if no then return no end
if redis.call('STRLEN', beside) ~= tonumber(size) then
  return redis.call('EXISTS', beside) == 0 and 'missing' or 'size'
end
if size == '0' then redis.call('SET', P .. path, '') else redis.call('RENAME', beside, P .. path) end
keep(path, etag, mark, crc, words)
if upload ~= '' then
  redis.call('UNLINK', P .. '//surgetank/upload/' .. upload)
  redis.call('HDEL', UPLOADS, upload)
end
return 'ok'
