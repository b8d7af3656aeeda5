//! How much of the machine other programs took, so that a limit on frame times is one of this program.

/// Ticks of all cores since the machine started, and of this process.
#[derive(Clone, Copy)]
pub struct Ticks {
    busy: f64,
    all: f64,
    own: f64,
}

/// As of now; `None` where the system has no `/proc`.
pub fn ticks() -> Option<Ticks> {
    let (cores, own) =
        (std::fs::read_to_string("/proc/stat").ok()?, std::fs::read_to_string("/proc/self/stat").ok()?);
    parse(&cores, &own)
}

/// The share of the cores that others left from one look to the other, 0 to 1.
pub fn left(begin: Ticks, end: Ticks) -> f64 {
    let all = end.all - begin.all;
    let others = (end.busy - begin.busy) - (end.own - begin.own);
    if all > 0.0 { (1.0 - others / all).clamp(0.0, 1.0) } else { 1.0 }
}

fn parse(cores: &str, own: &str) -> Option<Ticks> {
    let line = cores.lines().next()?.strip_prefix("cpu ")?;
    let times: Vec<f64> = line.split_whitespace().map_while(|time| time.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; what a guest took is in user already.
    let all: f64 = times.iter().take(8).sum();
    let idle = times.get(3)? + times.get(4)?;
    // Behind the name, which may have spaces: utime and stime are the 14th and 15th field of all.
    let mut fields =
        own.rsplit_once(')')?.1.split_whitespace().skip(11).map_while(|time| time.parse::<f64>().ok());
    let own = fields.next()? + fields.next()?;
    Some(Ticks { busy: all - idle, all, own })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_machine_is_left() {
        let own = |ticks: u32| format!("7 (a (name) b) S 1 2 3 4 5 6 7 8 9 10 {ticks} 0 0 0");
        let begin = parse("cpu  100 0 0 100 0 0 0 0 0 0\ncpu0 1", &own(10)).unwrap();
        let end = parse("cpu  250 0 0 150 0 0 0 0 0 0\ncpu0 1", &own(60)).unwrap();
        assert_eq!(left(begin, end), 0.5);
        assert!(parse("intr 1", &own(0)).is_none());
    }
}
