local _, path = unpack(ARGV)
if look(path) then
  redis.call('UNLINK', P .. path)
  redis.call('HDEL', RECORDS, path)
  redis.call('ZREM', INDEX, path)
end
return 'ok'
