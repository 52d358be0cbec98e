#pragma once
enum { _SC_PAGESIZE = 29 }; // macOS
long sysconf(int name);
