#!/bin/sh
# Stand-in for a C++ compiler: a GPU host has one, or cleared caches could not be built again. The
# stand-in training job builds its cache without compiling anything.
case "$1" in
--version | -v) echo "g++ (stand-in of the fleetfix lab) 12.2.0" ;;
*) echo "g++: a stand-in of the fleetfix lab compiles nothing" >&2; exit 1 ;;
esac
