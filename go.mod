module github.com/kvferry/kvferry

go 1.26.0
