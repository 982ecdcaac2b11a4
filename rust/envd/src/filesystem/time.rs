//! Times of files as text.

/// 0001-01-01T00:00:00Z to 9999-12-31T23:59:59Z, from google/protobuf/timestamp.proto.
const RANGE: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;

/// RFC 3339 (UTC, nanoseconds where there are any) of `seconds` since 1970 and `nanos`. Times outside the years 1 to 9999, which
/// protobuf's `Timestamp` cannot carry but a file system can, become the nearest one that it can.
pub fn rfc3339(seconds: i64, nanos: i64) -> String {
    let nanos = if RANGE.contains(&seconds) { nanos.clamp(0, 999_999_999) } else { 0 };
    let seconds = seconds.clamp(*RANGE.start(), *RANGE.end());
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let fraction = if nanos == 0 { String::new() } else { format!(".{nanos:09}") };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z")
}

/// The date of an HTTP header (RFC 9110 §5.6.7, IMF-fixdate) of `seconds` since 1970; clamped to the years 1 to 9999.
pub fn http_date(seconds: i64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"]; // 1970-01-01 was a Thursday
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let seconds = seconds.clamp(*RANGE.start(), *RANGE.end());
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil_from_days(days);
    let (weekday, month) = (DAYS[days.rem_euclid(7) as usize], MONTHS[(month - 1) as usize]);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{weekday}, {day:02} {month} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

/// Year, month and day of a day number counted from 1970-01-01. Counting years from 1 March puts the leap day last, so that
/// months have the repeating lengths that `(5 * m + 2) / 153` encodes; an era is the 400 years after which the calendar repeats.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let since_era_start = days + 719_468; // days from 0000-03-01 to 1970-01-01
    let era = since_era_start.div_euclid(146_097);
    let day_of_era = since_era_start.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_instants() {
        let cases = [
            (0, 0, "1970-01-01T00:00:00Z"),
            (-1, 500_000_000, "1969-12-31T23:59:59.500000000Z"),
            (951_782_400, 0, "2000-02-29T00:00:00Z"),
            (1_709_251_199, 1, "2024-02-29T23:59:59.000000001Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00Z"),
            (253_402_300_799, 9, "9999-12-31T23:59:59.000000009Z"),
            (i64::MAX, 9, "9999-12-31T23:59:59Z"),
            (i64::MIN, 9, "0001-01-01T00:00:00Z"),
        ];
        for (seconds, nanos, expected) in cases {
            assert_eq!(rfc3339(seconds, nanos), expected);
        }
    }

    #[test]
    fn dates_of_http() {
        // The first is the example of RFC 9110 §5.6.7.
        assert_eq!(http_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(http_date(-1), "Wed, 31 Dec 1969 23:59:59 GMT");
        assert_eq!(http_date(i64::MAX), "Fri, 31 Dec 9999 23:59:59 GMT");
    }
}
