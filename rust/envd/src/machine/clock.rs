//! The wall clock: stale after a resume until the host says what time it is.

use nix::sys::time::TimeSpec;
use nix::time::{clock_gettime, clock_settime, ClockId};

/// Smaller differences are left alone: the host's message takes about as long, and stepping disturbs timers.
const TOLERANCE_NS: i128 = 20_000_000;

/// How far a repeated message may lie behind and still be a late one rather than a clock that is ahead.
const LATE_NS: i128 = 5_000_000_000;

const NS: i128 = 1_000_000_000;

/// Sets the clock to `unix_ns` if it is off by more than 20 ms. What is `repeated` tells the same guest the time once more: as the
/// message was on its way for a while, it can only show that the clock is late, and the quickest of several decides.
///
/// # Errors
/// Those of reading or setting the clock.
pub fn step_to(unix_ns: i128, repeated: bool) -> nix::Result<()> {
    let now = clock_gettime(ClockId::CLOCK_REALTIME)?;
    let difference = unix_ns - (i128::from(now.tv_sec()) * NS + i128::from(now.tv_nsec()));
    if is_right(difference, repeated) {
        return Ok(());
    }
    let seconds = i64::try_from(unix_ns.div_euclid(NS)).map_err(|_| nix::errno::Errno::EINVAL)?;
    let nanoseconds = i64::try_from(unix_ns.rem_euclid(NS)).map_err(|_| nix::errno::Errno::EINVAL)?;
    clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::new(seconds, nanoseconds))
}

/// Whether a clock that a message says is `difference` nanoseconds late can stay.
fn is_right(difference: i128, repeated: bool) -> bool {
    difference.abs() <= TOLERANCE_NS || (repeated && (-LATE_NS..0).contains(&difference))
}

/// Nanoseconds of unix time of an RFC 3339 timestamp; `None` when it is not one.
pub fn parse_rfc3339(text: &str) -> Option<i128> {
    let number = |range: std::ops::Range<usize>| -> Option<i64> {
        let digits = text.get(range)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    };
    let bytes = text.as_bytes();
    let separators = [(4, b"-"), (7, b"-"), (10, b"T"), (13, b":"), (16, b":")];
    if separators.iter().any(|(at, wanted)| bytes.get(*at).map(u8::to_ascii_uppercase) != Some(wanted[0])) {
        return None;
    }
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }

    let mut rest = text.get(19..)?;
    let mut nanoseconds = 0;
    if let Some(fraction) = rest.strip_prefix('.') {
        let length = fraction.bytes().take_while(u8::is_ascii_digit).count();
        let digits = &fraction[..length.min(9)];
        nanoseconds = format!("{digits:0<9}").parse::<i128>().ok().filter(|_| length > 0)?;
        rest = &fraction[length..];
    }
    let offset = match rest.as_bytes() {
        [b'Z' | b'z'] => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let at = text.len() - 5;
            let seconds = number(at..at + 2)? * 3600 + number(at + 3..at + 5)? * 60;
            if *sign == b'-' {
                -seconds
            } else {
                seconds
            }
        }
        _ => return None,
    };
    let seconds = days_from_epoch(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
    Some(i128::from(seconds) * NS + nanoseconds)
}

/// Days from 1970-01-01 in the proleptic Gregorian calendar, by counting from 1 March so that leap days come last.
fn days_from_epoch(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    year * 365 + leap_days + (month * 153 + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_message_that_was_slow_does_not_put_the_clock_back() {
        let ms = |count: i128| count * 1_000_000;
        for repeated in [false, true] {
            assert!(is_right(ms(10), repeated) && is_right(ms(-10), repeated));
            assert!(!is_right(ms(100), repeated) && !is_right(ms(-10_000), repeated));
            assert_eq!(is_right(ms(-200), repeated), repeated);
        }
    }

    #[test]
    fn reads_timestamps() {
        let cases = [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T12:30:45.5Z", 951_827_445 * NS + 500_000_000),
            ("2026-11-29T15:24:34.123456789+00:00", 1_795_965_874 * NS + 123_456_789),
            ("2026-11-29T16:24:34.1234567891+01:00", 1_795_965_874 * NS + 123_456_789),
            ("2024-12-31t23:59:59z", 1_735_689_599 * NS),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_rfc3339(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_not_a_timestamp() {
        for text in ["", "now", "2026-11-29", "2026-11-29T15:24:34", "2026-13-01T00:00:00Z", "2026-11-29T15:24:34.Z"] {
            assert_eq!(parse_rfc3339(text), None, "{text}");
        }
        assert_eq!(parse_rfc3339("2026-11-29T15:24:34é00:00"), None);
    }
}
